"""The Python API, `import jaxprompt as jp`. The commands are thin wrappers of it."""
