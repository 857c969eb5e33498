"""vGPU pool with API-sandbox gates: GLB scheduling, sandbox, arbitration, seven scenarios."""
