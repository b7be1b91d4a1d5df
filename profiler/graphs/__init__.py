"""Graphs of models: how they are made from modules, and what learning sees of them."""
