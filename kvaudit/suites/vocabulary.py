"""The closed vocabulary of the procedural suites: small enough that a million-parameter model can learn every word."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# The filler's names are nobody that a rule or an order is about.
CLERKS = _words("adam beth clara david edith frank gina henry")
PEOPLE = _words(
    "anna bob carl dora emil fay gus hana ivan jane kurt lena mark nora omar paul rosa sam tina uma vera zed"
)
ANIMALS = _words(
    "bear wolf fox owl crow hawk lion tiger deer goat horse sheep whale seal shark frog toad snake eagle robin "
    "mouse rabbit otter badger camel zebra panda koala beaver moose lynx duck"
)
SECRET_CODES = _words(
    "amber ruby jade pearl coral ivory olive lemon mint plum cherry maple cedar birch willow lotus rose iris lily "
    "daisy river lake ocean island desert canyon valley forest storm thunder snow frost"
)
NOUNS = _words(
    "lamp table chair window carpet clock kettle basket ladder bucket hammer mirror blanket candle bottle pillow "
    "shelf broom drawer curtain"
)
VERBS = _words("moved cleaned counted painted checked fixed sold found bought lost")
STATES = _words("old clean broken heavy empty new late ready wet warm")
PLACES = _words("hall yard shop barn attic garage office kitchen")
