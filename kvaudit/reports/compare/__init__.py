"""Two result files of any harness: the drift between them, decided and shown as a run is."""
