"""The small model that ships with the package, as an ordinary Hugging Face folder; made by ``kvaudit pretrain``."""
