"""What `import jaxprompt as jp` offers. The commands are thin over the same functions."""
