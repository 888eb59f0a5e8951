"""Serving our sampler to other programs, under any policy: an OpenAI-compatible server and models for harnesses."""
