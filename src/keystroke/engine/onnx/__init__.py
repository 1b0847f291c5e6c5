"""The embedded engine: Llama, Qwen2 and Qwen3 models on ONNX Runtime, on the CPU of any laptop."""
