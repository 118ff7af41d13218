# Snakemake's side of `labkit run --on PROFILE`: one rule, which runs one job (labkit/workflow/jobs.py) on one GPU.
#
# Its output is the job's file of rows. What the job printed and its executed notebook are logs, since logs are kept when
# a job fails. labkit/workflow/engine.py writes the configuration; a profile may set `labkit`, the command on the nodes.
import math


wildcard_constraints:
    job="[^/]+",


rule all:
    localrule: True
    input:
        [local(f"{job}.tar") if config["storage"] else f"{job}/rows.tar" for job in config["minutes"]],


rule job:
    input:
        definition="{job}/job.json",
        # predictions are made of what the GPUs can reach, if this run measures that
        first=lambda wildcards: [ancient(f"{job}/rows.tar") for job in config["first"] if wildcards.job not in config["first"]],
    output:
        "{job}/rows.tar",
    log:
        text="{job}/job.log",
        notebook="{job}/notebook.ipynb",
    resources:
        # the job stops itself, and says so, before the cluster does
        runtime=lambda wildcards: math.ceil(config["minutes"][wildcards.job]) + 10,
    params:
        labkit=config.get("labkit", config["here"]),
    shell:
        "{params.labkit} run --job {input.definition:q} >{log.text:q} 2>&1"


# Where jobs and this machine share no files, definitions go out and rows come back through the profile's storage.
if config["storage"]:

    rule send:
        localrule: True
        input:
            local("{job}/job.json"),
        output:
            "{job}/job.json",
        shell:
            "cp {input:q} {output:q}"

    rule bring:
        localrule: True
        input:
            "{job}/rows.tar",
        output:
            local("{job}.tar"),
        shell:
            "cp {input:q} {output:q}"
