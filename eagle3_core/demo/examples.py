"""Answers of our own that show the writer the wanted length and tone: one of its domain stands before each prompt."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "story": (
        ("Write a short story about a goose who wants to dance.",
         "Once there was a goose named Gilda who wanted to dance. Every evening she watched the village band from behind "
         "a fence. \"Geese do not dance,\" said the rooster, and Gilda felt sad. But one night the fiddler saw her feet "
         "tapping. He played a slow tune just for her, and she turned in a circle under the lanterns. The whole village "
         "clapped. From then on, Gilda danced every Saturday, and even the rooster came to watch."),
        ("Tell me a very short story about a boy named Sam who finds an old coin.",
         "Sam was digging in the garden when he found an old coin. It was green and dirty, so he washed it in the sink. "
         "On one side there was a ship. Sam showed it to his grandfather, who smiled. \"I lost this coin when I was your "
         "age,\" he said. Sam gave the coin back, and his grandfather told him stories about the sea until bedtime."),
        ("Write a short story about a cloud who is too shy to rain.",
         "High above the hills lived a small cloud who was too shy to rain. All the other clouds poured and splashed, but "
         "the small cloud only watched. One day she saw a dry little flower in a field. \"Please,\" said the flower, \"I "
         "am so thirsty.\" The cloud took a deep breath and let one drop fall, then another. The flower lifted its head. "
         "The cloud was proud, and she was never shy again."),
        ("Can you tell me a bedtime story about a squirrel who forgets where the nuts are?",
         "Nico the squirrel hid his nuts all over the park. When winter came, he could not remember where they were. He "
         "looked under the bench and behind the fountain, but he found nothing. An old pigeon watched him. \"Follow the "
         "small trees,\" she said. Some of the nuts had begun to grow! Nico laughed, and he dug up the rest beside them. "
         "That night he slept with a full belly."),
    ),
    "explain": (
        ("What is a lighthouse?",
         "A lighthouse is a tall tower near the sea with a bright light at the top. The light shows ships where the land "
         "is, so they do not hit the rocks. Each lighthouse has its own pattern of flashes. Sailors can tell from the "
         "pattern where they are."),
        ("Why do we wear shoes? Explain in simple words.",
         "We wear shoes to protect our feet. The ground can be hot, cold, wet or sharp, and a shoe keeps the foot safe "
         "and dry. Shoes also help us walk and run for a long time. Different shoes are good for different places."),
        ("How is wool made?",
         "Wool comes from sheep. Once a year, a farmer cuts off the sheep's thick coat. The wool is washed, combed and "
         "spun into long threads. Then people can knit the threads into warm sweaters and socks."),
    ),
    "describe": (
        ("Describe a barn.",
         "The barn is big and red, with a wide wooden door. Inside it smells of hay and warm animals. Swallows fly in and "
         "out under the roof. In the afternoon, thin lines of sunlight fall through the boards."),
        ("Write a short paragraph about a bell.",
         "A bell is a small thing with a big voice. It is made of metal and shaped like a cup. When you swing it, a clear "
         "sound fills the air. Bells call children to school and tell people what time it is."),
    ),
    "tips": (
        ("Give me three tips for learning to cook.",
         "1. Start with easy meals, like eggs or soup.\n2. Read the whole recipe before you begin.\n3. Taste your food "
         "while you cook, and add salt a little at a time.\n\nDo not worry about mistakes. Every cook makes them."),
        ("Do you have any advice on keeping fish?",
         "Yes! Give the fish enough room and clean water. Feed them only a little, once or twice a day. Keep the tank away "
         "from direct sunlight. Watch your fish every day, and you will soon notice when something is wrong."),
    ),
    "howto": (
        ("How do I sharpen a pencil?",
         "1. Hold the sharpener still with one hand.\n2. Put the pencil into the hole.\n3. Turn the pencil slowly until "
         "the tip is sharp.\n4. Empty the sharpener over a bin.\n\nNow your pencil is ready to use."),
        ("Explain how to make toast.",
         "First, cut a slice of bread. Put it into the toaster and press the lever down. Wait until the bread is golden "
         "and pops up. Then spread butter on the warm toast and enjoy it."),
    ),
    "compare": (
        ("What is the difference between a lake and a river?",
         "A lake is still water with land all around it. A river is water that flows from one place to another. Lakes are "
         "often wide and quiet, while rivers are long and always moving. Both are home to fish and birds."),
        ("Compare a pen and a brush.",
         "A pen has a hard tip and makes thin lines. A brush has soft hair and makes wide lines. People write with a pen "
         "and paint with a brush. Both need ink or color to leave a mark."),
    ),
    "talk": (
        ("I feel shy because I am new in my class. What should I do?",
         "It is normal to feel shy in a new class. Start with a smile and say hello to the person next to you. Ask a "
         "simple question, like what they do after school. Give it some time, and you will soon know everyone."),
        ("Hi there!",
         "Hello! It is nice to hear from you. I hope you are having a good day. What would you like to talk about?"),
    ),
    "note": (
        ("Write a short thank-you note to my aunt for a scarf.",
         "Dear Aunt,\n\nThank you so much for the lovely scarf. It is warm and soft, and I wear it every day. You are very "
         "kind to think of me. I hope to see you soon.\n\nWith love"),
    ),
    "plan": (
        ("Give me ideas for a snowy day.",
         "In the morning, build a snowman and go sledding. Come home for hot soup at noon. In the afternoon, bake cookies "
         "or play a board game. Finish the day with a good book and a warm blanket."),
    ),
}  # fmt: skip
