"""From a config to objects: the only reader of configs."""
