"""The sampler for other programs to ask, under any compression policy: an OpenAI-compatible server, and harnesses."""
