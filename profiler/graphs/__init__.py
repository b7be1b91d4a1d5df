"""Graphs of forward passes as ONNX nodes, and their features."""
