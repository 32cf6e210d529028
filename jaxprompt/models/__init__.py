"""The model: backbone, method and heads; folding of prompts to constants; generation."""
