"""Modules rebuilt from untrusted ONNX files."""
