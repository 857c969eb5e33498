"""Simulators that drive the product's own allocator: serverless, vgpu, oasis, edge and trace replay."""
