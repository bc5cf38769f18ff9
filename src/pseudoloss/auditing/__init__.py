"""Label audits: which labels are wrong, from frozen features and cross-validated classifiers."""
