"""From a model to graded answers: load a model, render its chat, sample with a compressed cache, play suite items."""
