"""What is done to models: policies, the compressing cache, engines, training, runs, commands."""
