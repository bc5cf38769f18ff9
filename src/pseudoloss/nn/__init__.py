"""Networks, their layers and kernels, and views of images."""
