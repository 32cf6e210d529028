"""Steps, the loop of a run, what it measures, and the folder that it writes."""
