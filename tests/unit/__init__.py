"""Every concept of stages/ and pipelines/ by itself."""
