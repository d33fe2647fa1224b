"""Questions for SmolLM2: templates filled with topics; some topics are held out of the training.

python examples/smollm2/prompts.py 60 > questions.jsonl    # held-out questions, for dflash-bench decode --data
"""

import hashlib
import json
import random
import sys
from collections.abc import Iterator

HELD_OUT_EVERY = 20  # one of this many topics is held out
SEED = 48

TOPICS = """
gravity; photosynthesis; the water cycle; volcanoes; earthquakes; the solar system; black holes; electricity; magnets;
sound waves; light; atoms; molecules; chemical bonds; acids and bases; evolution; genetics; DNA; cells; bacteria;
viruses; vaccines; the immune system; the heart; the brain; the lungs; digestion; sleep; dreams; memory; stress;
exercise; healthy eating; vitamins; protein; sugar; coffee; tea; chocolate; bread; cheese; rice; pasta; soup; salad;
democracy; monarchy; the French Revolution; the Roman Empire; ancient Egypt; ancient Greece; the Renaissance;
the Industrial Revolution; the Cold War; the Silk Road; the printing press; the steam engine; the telephone; radio;
television; the internet; computers; smartphones; artificial intelligence; machine learning; neural networks;
databases; programming languages; operating systems; cloud computing; encryption; passwords; robots; drones;
electric cars; trains; airplanes; ships; bicycles; bridges; skyscrapers; architecture; painting; sculpture; music;
jazz; classical music; rock music; dance; theater; poetry; novels; fairy tales; film; photography; chess; football;
basketball; tennis; swimming; running; yoga; meditation; mountains; rivers; oceans; deserts; rainforests; islands;
climate change; renewable energy; solar panels; wind power; nuclear power; recycling; pollution; farming; gardening;
roses; trees; bees; butterflies; birds; eagles; penguins; dogs; cats; horses; elephants; lions; whales; sharks;
dinosaurs; fossils; the moon; Mars; Jupiter; comets; stars; galaxies; telescopes; space travel; satellites; money;
banks; inflation; taxes; stocks; budgeting; saving money; insurance; small businesses; marketing; leadership;
teamwork; communication; job interviews; resumes; public speaking; writing essays; reading; studying; mathematics;
fractions; percentages; geometry; algebra; probability; statistics; prime numbers; logic; philosophy; ethics;
psychology; happiness; friendship; family; education; schools; libraries; museums; travel; hotels; camping; hiking;
cooking; baking; fishing; sewing; knitting; pottery; woodworking; glass; steel; gold; diamonds; plastic; paper; cotton;
clocks; calendars; maps; compasses; languages; alphabets; grammar; spelling; holidays; weddings; birthdays; snow; rain;
clouds; tornadoes; hurricanes; rainbows; seasons; autumn; winter; spring; summer
"""
QUESTIONS = {
    "explain": (
        "What is the most important thing to know about {}?",
        "Explain {} to a child.",
        "Explain {} in simple terms.",
        "Tell me about {}.",
        "Why do people care about {}?",
        "How would you describe {} in one paragraph?",
        "What are common misunderstandings about {}?",
        "Give a short history of {}.",
    ),
    "list": (
        "List five facts about {}.",
        "What are the main advantages and disadvantages of {}?",
        "Give me three tips about {}.",
        "Name some words that are related to {}.",
        "Suggest ten titles for an article about {}.",
    ),
    "write": (
        "Write a short story about {}.",
        "Write a poem about {}.",
        "Write a friendly email about {}.",
        "Write a dialogue between two friends about {}.",
        "Write a product review that mentions {}.",
        "Summarize what a beginner should learn about {} first.",
    ),
}
TASKS = """
reverses a string; checks whether a number is prime; computes the factorial of a number; sorts a list of numbers;
finds the largest number in a list; counts the vowels in a string; checks whether a string is a palindrome;
computes Fibonacci numbers; merges two sorted lists; removes duplicates from a list; counts the words in a text;
converts Celsius to Fahrenheit; finds the greatest common divisor of two numbers; flattens a nested list;
computes the average of a list; transposes a matrix; checks whether two strings are anagrams; reads a file line by line;
finds the longest word in a sentence; sums the digits of a number; converts a number to binary; rotates a list;
groups words by their first letter; finds the second largest number; counts how often each character occurs;
checks balanced parentheses; implements binary search; implements bubble sort; implements a stack; implements a queue;
generates a random password; validates an email address; computes compound interest; multiplies two matrices;
capitalizes each word; finds all pairs with a given sum; splits a list into chunks; inverts a dictionary;
computes the median of a list; prints a multiplication table; parses a date; computes the area of a circle;
finds common elements of two lists; checks whether a year is a leap year; shuffles a list; encodes a Caesar cipher;
checks whether a number is even; finds the smallest number in a list; counts the consonants in a text;
returns the last element of a list; squares every number in a list; filters the even numbers of a list;
computes the power of a number; swaps two variables; finds the length of a string; repeats a string;
replaces spaces with underscores; checks whether a list is sorted; computes the product of a list;
finds the index of an element; joins a list of words; removes vowels from a string; zips two lists into a dictionary;
sorts words by their length; checks whether a string contains only digits; converts hours to minutes;
converts miles to kilometers; computes the distance between two points; finds the missing number in a sequence;
writes a list to a file; counts the lines of a file; reads a CSV file; parses a JSON string; draws a random sample;
simulates rolling two dice; computes the perimeter of a rectangle; computes the volume of a sphere;
solves a quadratic equation; generates all prime numbers up to a limit; computes the least common multiple;
checks whether a number is a perfect square; reverses the words of a sentence; finds the most common element of a list;
implements insertion sort; implements merge sort; implements quicksort; implements a linked list;
implements depth first search; implements breadth first search; computes the edit distance of two strings;
prints a triangle of stars; plays rock paper scissors; plays a guessing game; counts down from ten; measures time;
converts a decimal number to Roman numerals; removes punctuation from a text; computes a moving average;
normalizes a list of numbers; finds the intersection of two sets; generates permutations of a list;
sums the even numbers of a list; doubles every second element of a list; prints the current date
"""
CODE = (
    "Write a Python function that {}.",
    "Write a Python function that {}. Explain how it works.",
    "Show me Python code that {}, with an example.",
    "How do I write a program that {}?",
)
SUMS = (
    "What is {0} plus {1}?",
    "What is {0} times {1}?",
    "A shop sells {0} apples for {1} dollars. How much does each apple cost?",
    "I have {0} coins and find {1} more. How many coins do I have? Explain your steps.",
)


def split(text: str) -> list[str]:
    return [" ".join(part.split()) for part in text.split(";")]


def is_held_out(topic: str) -> bool:
    """Decides by the hash of the topic, so that other topics do not change the split."""
    return hashlib.sha256(topic.encode()).digest()[0] % HELD_OUT_EVERY == 0


def list_questions(held_out: bool) -> Iterator[tuple[str, str]]:
    """(kind, question) of all topics that are held out, or of all others, in an order that is always the same."""
    for kind, templates in QUESTIONS.items():
        for topic in split(TOPICS):
            if is_held_out(topic) == held_out:
                yield from ((kind, template.format(topic)) for template in templates)
    for task in split(TASKS):
        if is_held_out(task) == held_out:
            yield from (("code", template.format(task)) for template in CODE)
    for first in range(2, 60):
        for second in (3, 7, 12, 25):
            if is_held_out(f"{first} {second}") == held_out:
                yield from (("sums", template.format(first, second)) for template in SUMS)


def choose_questions(held_out: bool, count: int) -> list[tuple[str, str]]:
    """`count` questions, as many of each kind as there are, mixed."""
    kinds: dict[str, list[str]] = {}
    for kind, question in list_questions(held_out):
        kinds.setdefault(kind, []).append(question)
    rng = random.Random(SEED)
    for questions in kinds.values():
        rng.shuffle(questions)
    chosen: list[tuple[str, str]] = []
    while len(chosen) < count and kinds:
        for kind in list(kinds):
            chosen.append((kind, kinds[kind].pop()))
            if not kinds[kind]:
                del kinds[kind]
    return chosen[:count]


if __name__ == "__main__":
    for kind, question in choose_questions(True, int(sys.argv[1])):
        print(json.dumps({"turns": [question], "kind": kind}))
