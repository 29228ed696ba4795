"""Decrypting where the tensors go: the device kernels, and the pipeline that feeds them."""
