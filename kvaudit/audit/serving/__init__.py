"""Serving kvaudit's sampler to other programs, under any policy: an OpenAI-compatible server, models for harnesses."""
