"""The score of SemEval-2010 task 8, as the scorer of the task has it."""

import collections


def official_semeval(gold, pred):
    """The scorer of the task: a confusion matrix of 9 relations and Other, with a column beside for
    answers of the right relation in the wrong direction; macro-average over the relations of the
    key, without Other. In percent.
    """
    key = {name.split("(")[0] for name in gold} - {"Other"}
    names = sorted(key | {name.split("(")[0] for name in pred})
    table = {row: collections.Counter() for row in names}
    wrong_way = collections.Counter()
    for true, answer in zip(gold, pred, strict=True):
        row, column = true.split("(")[0], answer.split("(")[0]
        if row == column and true != answer:
            wrong_way[row] += 1
        else:
            table[row][column] += 1
    scores = []
    for name in key:
        right = table[name][name]
        answer = sum(row[name] for row in table.values()) + wrong_way[name]
        there = sum(table[name].values()) + wrong_way[name]
        p = 100 * right / answer if answer else 0.0
        r = 100 * right / there if there else 0.0
        scores.append(2 * p * r / (p + r) if p + r else 0.0)
    return sum(scores) / len(scores)
