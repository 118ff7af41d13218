"""Study 03: persistent device tables, a decode whose kernel reads what to do from tables on the GPU."""
