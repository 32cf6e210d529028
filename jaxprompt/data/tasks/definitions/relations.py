"""Relations between marked entities, arguments of events, and relations in dialogues.

Columns and classes are those of the published files; those of wiki80 are of OpenNRE (Han et al.
2019), those of chemprot and scierc of SciBERT (Beltagy et al. 2019). The template is DART's (Zhang
et al. 2022, appendix A.2), and label words are the names of the relations.
"""

from jaxprompt.data.tasks.readers.entities import relation_words
from jaxprompt.data.tasks.task import Definitions


def _relations(field: str, labels: tuple[str, ...], **fields) -> dict:
    return {
        "fields": (field,),
        "labels": labels,
        "words": tuple((relation_words(name),) for name in labels),
        "template": f"{{{field}|marked}} {{entity1}} is the [mask] of {{entity2}}",
        "causal": f"{{{field}|marked}} The relation of {{entity1}} to {{entity2}} is [mask]",
        "text": f"entity1: {{entity1}} entity2: {{entity2}} {field}: {{{field}|marked}}",
        "plain": f"{{{field}|marked}}",
        "metric": "micro_f1",
        **fields,
    }


_PAIRS = (
    "Cause-Effect Component-Whole Content-Container Entity-Destination Entity-Origin "
    "Instrument-Agency Member-Collection Message-Topic Product-Producer"
).split()
_DIRECTED = tuple(f"{name}({order})" for name in _PAIRS for order in ("e1,e2", "e2,e1"))
_TACRED = tuple("""
no_relation org:alternate_names org:city_of_headquarters org:country_of_headquarters org:dissolved
org:founded org:founded_by org:member_of org:members org:number_of_employees/members org:parents
org:political/religious_affiliation org:shareholders org:stateorprovince_of_headquarters
org:subsidiaries org:top_members/employees org:website per:age per:alternate_names
per:cause_of_death per:charges per:children per:cities_of_residence per:city_of_birth
per:city_of_death per:countries_of_residence per:country_of_birth per:country_of_death
per:date_of_birth per:date_of_death per:employee_of per:origin per:other_family per:parents
per:religion per:schools_attended per:siblings per:spouse per:stateorprovince_of_birth
per:stateorprovince_of_death per:stateorprovinces_of_residence per:title
""".split())  # fmt: skip
_WIKI80 = tuple(name.strip() for name in """
after a work by; applies to jurisdiction; architect; characters; child; competition class; composer;
constellation; contains administrative territorial entity; country; country of citizenship; country
of origin; crosses; developer; director; distributor; father; field of work; followed by; follows;
genre; has part; head of government; headquarters location; heritage designation; instance of;
instrument; language of work or name; league; licensed to broadcast to; located in or next to body
of water; located in the administrative territorial entity; located on terrain feature; location;
location of formation; main subject; manufacturer; member of; member of political party; military
branch; military rank; mother; mountain range; mouth of the watercourse; movement; nominated for;
notable work; occupant; occupation; operating system; operator; original language of film or TV
show; original network; owned by; part of; participant; participant of; participating team;
performer; place served by transport hub; platform; position held; position played on team /
speciality; publisher; record label; religion; residence; said to be the same as; screenwriter;
sibling; sport; sports season of league or competition; spouse; subsidiary; successful candidate;
taxon rank; tributary; voice type; winner; work location
""".replace("\n", " ").split(";"))  # fmt: skip
_CHEMPROT = (
    "ACTIVATOR", "AGONIST", "AGONIST-ACTIVATOR", "AGONIST-INHIBITOR", "ANTAGONIST", "DOWNREGULATOR",
    "INDIRECT-DOWNREGULATOR", "INDIRECT-UPREGULATOR", "INHIBITOR", "PRODUCT-OF", "SUBSTRATE",
    "SUBSTRATE_PRODUCT-OF", "UPREGULATOR",
)  # fmt: skip
_SCIERC = (
    "COMPARE", "CONJUNCTION", "EVALUATE-FOR", "FEATURE-OF", "HYPONYM-OF", "PART-OF", "USED-FOR"
)  # fmt: skip
_ROLES = tuple("""
NA Adjudicator Agent Artifact Attacker Beneficiary Buyer Defendant Destination Entity Giver
Instrument Org Origin Person Place Plaintiff Prosecutor Recipient Seller Target Vehicle Victim
""".split())  # fmt: skip
_DIALOGUE = tuple("""
per:positive_impression per:negative_impression per:acquaintance per:alumni per:boss per:subordinate
per:client per:dates per:friends per:girl/boyfriend per:neighbor per:roommate per:children
per:other_family per:parents per:siblings per:spouse per:place_of_residence per:place_of_birth
per:visited_place per:origin per:employee_or_member_of per:schools_attended per:works per:age
per:date_of_birth per:major per:place_of_work per:title per:alternate_names per:pet
gpe:residents_of_place gpe:births_in_place gpe:visitors_of_place org:employees_or_members
org:students unanswerable
""".split())  # fmt: skip
_BRACKETS = {"entities": ("[[ | ]]", "<< | >>"), "offsets": "tags"}
_SUBJECT_OBJECT = {
    "label": "relation",
    "entities": ("subj_start|subj_end", "obj_start|obj_end"),
    "offsets": "last_word",
    "negative": "no_relation",
}
RELATIONS: Definitions = {
    "sem_eval_2010_task_8": _relations(
        "sentence", (*_DIRECTED, "Other"), label="relation",
        entities=("<e1>|</e1>", "<e2>|</e2>"), offsets="tags", negative="Other",
        metric="semeval_f1", hub="SemEvalWorkshop/sem_eval_2010_task_8",
        splits={"train": "train", "test": "test"},
    ),
    "scierc": _relations("text", _SCIERC, **_BRACKETS, metric="macro_f1"),
    "chemprot": _relations("text", _CHEMPROT, **_BRACKETS),
    "tacred": _relations("token", _TACRED, **_SUBJECT_OBJECT),
    "tacred_revisited": _relations("token", _TACRED, **_SUBJECT_OBJECT),
    "wiki80": _relations(
        "token", _WIKI80, label="relation", entities=("h.pos", "t.pos"), offsets="words",
        metric="accuracy",
    ),
    # Pairs of a trigger and a candidate in the same sentence, as of ACE 2005, which has no public
    # files: the 22 roles of Wadden et al. (2019), and NA where the candidate is no argument. A row
    # is a pair, or an event whose `arguments` list each candidate with its role.
    "event_arguments": _relations(
        "tokens", _ROLES, label="role", entities=("trigger", "argument"), offsets="words",
        negative="NA", nested="arguments",
        template="{tokens|marked} {entity2} is the [mask] of {entity1}",
    ),
    # Yu et al. (2020): a row is a dialogue with all its pairs; `r` lists the relations of one.
    "dialog_re": _relations(
        "dialog", _DIALOGUE, label="r", lines=("dialog",), entities=("x", "y"), offsets="text",
        negative="unanswerable", columns=("dialog", "relation_data"), nested="relation_data",
    ),
}  # fmt: skip
