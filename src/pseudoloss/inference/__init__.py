"""Using a trained model: files, predictions, evaluation, export."""
