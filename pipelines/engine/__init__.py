"""The embedded engine: a real small inference server that speaks the update protocols of LMDeploy, SGLang and vLLM.

`python -m pipelines.engine --model DIR --backend sglang` serves a Hugging Face checkpoint on the CPU or a GPU, takes
weight updates exactly as strictly as the engine it stands for, and says in its answers (key `real_engine`) where that
engine would have died or silently accepted. Importing this package loads no torch; `pipelines.launch` starts servers
from Python.
"""
