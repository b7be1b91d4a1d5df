"""What each ONNX operator does, in PyTorch: for modules that are rebuilt from files."""
