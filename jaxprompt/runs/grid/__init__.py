"""Many runs trained as one program."""
