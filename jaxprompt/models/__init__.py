"""Backbone, method and heads as one model, what of it folds to constants, and how it writes."""
