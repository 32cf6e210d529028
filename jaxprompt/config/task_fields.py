"""The fields of a config's block `task`."""

from jaxprompt.config.fields import Block, Words, flag, number, path, several, text, texts, word

TASK = Block(
    "what is answered",
    name=text("topics", "a known task, or custom: your own file, described below"),
    chat=flag(False, "the template up to [mask] is the user's turn of the tokenizer's own chat"),
    template=text(
        "", "empty = the task's own; form unified or nss: only what stands before the options"
    ),
    words=texts((), "label words per class, | between several of one; () = the task's own"),
    spaced=word(
        "", ("true", "false"), "label words are encoded behind a space; empty = the task's own"
    ),
    option=text("", "how {choices} writes one, as in {name}. {text}.; empty = the task's own"),
    fields=texts((), "custom: text columns; nsp, cls: the texts asked, () = the task's own"),
    label=text("label", "custom: column of the label"),
    labels=texts(
        (),
        "custom, and of tags: class names in order, or types of tags; () = found in the "
        "training examples",
    ),
    vocabulary=path(
        "",
        "custom: file of one word per line; those of one token are the classes, and "
        "examples of other labels are left out",
    ),
    choices=texts((), "custom: columns of the choices, or one that holds a list"),
    metric=word("", Words("scoring.metrics", "all_metrics"), "empty = the task's own"),
    positive=text("", "the positive class of f1, f1a and answer_f1; empty = the second"),
    target=text("", "custom: column of the text to write, for head.name=text"),
    answers=text("", "custom: column of answers in the last field, for head.name=spans"),
    number=text("", "custom: column of the number to predict, for head.name=regression"),
    limits=several(number(None, "custom: the least and the greatest that it can be", limit="")),
    tags=text("", "custom: column with a tag for every word, for head.name=tags"),
    scheme=word(
        "",
        Words("data.tasks.tags", "SCHEMES"),
        "of these tags; empty = found in the training examples; none: each is of one word",
    ),
    predicate=text(
        "",
        "custom: column of the word whose roles `tags` are, its index from 0 on; or of a "
        "list of such, with a list of tags for each",
    ),
    entities=texts(
        (), "custom: where each entity of the first field stands; the labels are relations"
    ),
    offsets=word(
        "tags",
        Words("data.tasks.readers.entities", "OFFSETS"),
        "of task.entities: tags, <e1>|</e1>; characters or words, a column of [start, end] or "
        "start|end of two; last_word: the same, the end included; text: a column of its text",
    ),
    markers=texts(
        (),
        "words in front of and behind each entity where a template says |marked; () = "
        "@ @ # #; with task.predicate around that, () = none",
    ),
    negative=text("", "custom: the class that is no relation, which micro_f1 leaves out"),
    question=texts(
        (),
        "custom: columns that make a question, of which examples are answers; for f1a and "
        "answer_f1",
    ),
    candidate=text("", "custom: the field of such an answer"),
    candidates=texts(
        (),
        "custom: a column of candidates and that of the right ones; each candidate becomes "
        "an example, as task.candidate",
    ),
    placeholder=text("", "custom: what stands for the candidate in the other columns"),
    form=word(
        "cloze",
        Words("config.schema", "forms"),
        "cloze: the words at a mask; text: T5's own text format; nsp, nss, unified, cls: as "
        "that pre-training task is asked in ppt.patterns; nss and unified answer by the name "
        "of an option",
    ),
    answer=text(
        "",
        'T5: what is written; empty = "[mask] {label}" (cloze), "{label} [sep]" (text); GLM: '
        '"{label}", which stands in its blank',
    ),
    eos=flag(True, "T5: the input ends with </s>"),
)
