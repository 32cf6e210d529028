"""What srl-eval.pl of CoNLL-2005 counts, stated by itself: the script is in Perl."""


def official(gold, pred):
    """States srl-eval.pl of CoNLL-2005: load_SE_tagging and discriminate_args. -> ok, op, ms"""

    def arguments(tags):
        phrases, last = [], "O"
        for word, tag in enumerate(tags):
            if tag.startswith("I-") and last[2:] == tag[2:] and last != "O":
                phrases[-1][2] = word
            elif tag != "O":
                phrases.append([tag[2:], word, word])
            last = tag
        spans, by_type = [], {}
        for kind, start, end in phrases:
            if kind[:2] == "C-" and kind[2:] in by_type:
                spans[by_type[kind[2:]]][1].append((start, end))
                continue
            kind = kind[2:] if kind[:2] == "C-" else kind
            by_type[kind] = len(spans)
            spans.append((kind, [(start, end)]))
        return spans

    ok = op = ms = 0
    for gold_row, actual in zip(gold, pred, strict=True):
        left = {(parts[0][0], parts[-1][1]): (kind, parts) for kind, parts in arguments(gold_row)}
        for kind, parts in arguments(actual):
            place = parts[0][0], parts[-1][1]
            same = left.get(place) == (kind, parts)
            if same:
                del left[place]
            ok, op = ok + (same and kind != "V"), op + (not same and kind != "V")
        ms += sum(kind != "V" for kind, _ in left.values())
    return ok, op, ms


def f1_of(ok, op, ms):
    """F1, precision and recall of what is right, over-predicted and missed."""
    precision = ok / (ok + op) if ok + op else 0.0
    recall = ok / (ok + ms) if ok + ms else 0.0
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    return {"role_f1": f1, "precision": precision, "recall": recall}
