"""From a model to answers: loading without running its code, chat, one sampler, conversations, degenerate answers."""
