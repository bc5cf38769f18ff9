"""The review page: look at doubtful labels in a browser and decide what is right."""
