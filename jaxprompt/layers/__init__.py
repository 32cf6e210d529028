"""Layers that all backbones share."""
