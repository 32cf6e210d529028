"""Tasks of support tickets."""

TICKETS = {
    "fields": ("message",),
    "label": "team",
    "labels": ("billing", "login", "shipping"),  # by index
    "template": "{message} This is about [mask].",
    "words": (("billing",), ("login",), ("shipping",)),
    "plain": "{message}",  # layout for a linear head
}
