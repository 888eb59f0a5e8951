"""The compressing cache: on stock transformers models, evicting by a policy, with its ledger of what left when."""
