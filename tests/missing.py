"""What a machine may lack, in the words of the tests that it then cannot run."""

NO_BROWSER = "no Chromium on this machine: the pages were not opened in a browser"
NO_GPU = "no CUDA device: the GPU tests did not run"
