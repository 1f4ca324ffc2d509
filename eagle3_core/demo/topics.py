"""What the demo's prompts are about: our own word lists, simple enough for a very small model."""

from __future__ import annotations

HEROES = (
    "a little fox", "a brave mouse", "a shy rabbit", "an old bear", "a curious kitten", "a small dragon",
    "a young girl named Mia", "a boy named Tom", "a kind giant", "a lonely robot", "a clever crow", "a sleepy owl",
    "a happy puppy", "a tiny ant", "a farmer named Joe", "a baker named Rosa", "a silly duck", "a gentle horse",
    "a red balloon", "a paper boat", "a lost penguin", "a grumpy cat", "a friendly ghost", "a young sailor named Ben",
    "a little star", "a quiet turtle", "a busy bee", "a girl named Lily and her dog", "two good friends",
    "a grandmother and her grandson", "a snowman", "a small blue bird", "a hungry wolf", "a young painter named Ana",
    "a wise old tree", "a hedgehog", "a little frog", "a lamb who was afraid of the dark", "a boy and his kite",
    "a teacher named Mrs. Green",
)  # fmt: skip

PLOTS = (
    "wants to see the sea", "loses a red scarf", "finds a golden key", "helps a friend", "gets lost in the forest",
    "learns to share", "plants a magic seed", "meets a new friend", "has a birthday party", "finds a secret door",
    "is afraid of thunder", "builds a small house", "goes on a long trip", "learns to swim", "bakes a big cake",
    "finds a lost toy", "dreams of flying", "makes a mistake and says sorry", "saves the day", "looks for the moon",
    "tells the truth", "wins a race", "visits the city for the first time", "takes care of a baby bird",
    "learns to be patient", "finds a treasure map", "paints a picture", "waits for the snow", "cannot sleep",
    "climbs a tall hill", "sings a song", "cleans the river", "learns to say thank you", "finds a magic stone",
    "shares the last apple",
)  # fmt: skip

PHENOMENA = (
    "rain", "snow", "wind", "thunder", "lightning", "a rainbow", "the sun", "the moon", "the stars", "clouds", "fog",
    "the tides", "an earthquake", "a volcano", "a river", "a desert", "a rainforest", "the ocean", "the seasons",
    "day and night", "gravity", "electricity", "a magnet", "light", "sound", "heat", "ice", "fire", "water", "air",
    "soil", "a seed", "photosynthesis", "the water cycle", "the food chain", "recycling", "energy", "an echo",
    "a shadow", "a mirror", "the heart", "the brain", "sleep", "dreams", "germs", "vitamins", "muscles", "bones",
    "money", "a bank", "a map", "a calendar", "a clock", "the internet", "a computer", "a battery", "an engine",
    "a bridge", "a telescope", "a microscope", "a thermometer", "a library", "a museum", "a hospital", "a farm",
    "a vote", "a law", "a holiday", "music", "art",
)  # fmt: skip

QUESTIONS = (
    "Why is the sky blue?", "Why do leaves change color?", "Why do we sleep?", "Why do birds sing?",
    "Why do cats purr?", "Why do dogs wag their tails?", "Why is the sea salty?", "Why do we need water?",
    "Why do people wear hats?", "Why do we brush our teeth?", "Why do plants need sunlight?", "Why do we laugh?",
    "Why do we cry?", "Why does ice float?", "Why do bees make honey?", "Why do we have seasons?",
    "Why does the moon change its shape?", "Why do birds fly south?", "Why do we eat breakfast?",
    "Why is exercise good for you?", "Why do people read books?", "Why do we have rules?", "Why do we say thank you?",
    "Why do people travel?", "Why is sleep important?", "Why are trees important?", "Why is it good to share?",
    "Why do we go to school?", "Why do people keep pets?", "Why is honesty important?", "How do birds fly?",
    "How do fish breathe?", "How do plants grow?", "How do bees make honey?", "How does a boat float?",
    "How does a car move?", "How does a fridge stay cold?", "How do clouds form?", "How do we hear sounds?",
    "How does a plane fly?", "How is bread made?", "How is cheese made?", "How is paper made?", "How is glass made?",
    "How do ants find food?", "How do spiders make webs?", "How do whales sleep?", "How do stars shine?",
    "How do caterpillars become butterflies?", "How does a lamp work?", "What do cows eat?", "What do bears eat?",
    "What makes a good friend?", "What makes a good teacher?", "What makes people happy?", "What is kindness?",
    "What is courage?", "What is teamwork?", "What is a healthy breakfast?", "What is a good hobby?",
)  # fmt: skip

ANIMALS = (
    "a cat", "a dog", "a horse", "a cow", "a sheep", "a goat", "a pig", "a rabbit", "a mouse", "a fox", "a wolf",
    "a bear", "a lion", "a tiger", "an elephant", "a giraffe", "a monkey", "a zebra", "a kangaroo", "a panda",
    "a penguin", "an owl", "an eagle", "a parrot", "a duck", "a swan", "a chicken", "a frog", "a turtle", "a snake",
    "a lizard", "a shark", "a whale", "a dolphin", "an octopus", "a bee", "a butterfly", "an ant", "a spider",
    "a snail", "a squirrel", "a hedgehog", "a bat", "a camel", "a deer",
)  # fmt: skip

FOODS = (
    "an apple", "a banana", "an orange", "a lemon", "a tomato", "a potato", "a carrot", "an onion", "rice", "pasta",
    "bread", "cheese", "butter", "milk", "honey", "an egg", "soup", "salad", "a pizza", "a sandwich", "a pancake",
    "chocolate", "ice cream", "tea", "coffee", "orange juice", "a cookie", "a cake", "a strawberry", "a pumpkin",
)  # fmt: skip

THINGS = (
    "a bicycle", "a car", "a train", "a boat", "a bus", "an airplane", "a chair", "a table", "a lamp", "a window",
    "a door", "a book", "a pencil", "a pair of shoes", "a coat", "an umbrella", "a hat", "a spoon", "a knife",
    "a cup", "a phone", "a radio", "a camera", "a piano", "a guitar", "a drum", "a ball", "a kite", "a doll",
    "a candle", "a ladder", "a hammer", "a basket", "a bed", "a blanket",
)  # fmt: skip

PLACES = (
    "a quiet beach", "a busy market", "a small village", "a big city", "a dark forest", "a green park", "a farm",
    "a kitchen", "a classroom", "a library", "a train station", "an old castle", "a mountain lake", "a snowy hill",
    "a garden in spring", "a street in autumn", "a harbor", "a zoo", "a toy shop", "a bakery", "a desert",
    "a jungle", "an island", "a river bank", "a playground", "a museum", "a cozy living room", "a rainy street",
    "a night sky full of stars", "a campsite",
)  # fmt: skip

HABITS = (
    "sleeping better", "saving money", "learning a new language", "making new friends", "staying healthy",
    "eating more vegetables", "keeping a room clean", "studying for a test", "waking up early", "growing tomatoes",
    "growing flowers", "taking care of a dog", "taking care of a cat", "taking good photos", "writing a story",
    "speaking in public", "staying calm", "drinking more water", "walking more every day", "saving water at home",
    "saving energy at home", "packing a suitcase", "traveling with children", "cooking for a family",
    "cooking on a small budget", "baking bread", "reading more books", "remembering names", "being a good listener",
    "being on time", "working from home", "starting a garden", "planning a party", "choosing a gift",
    "riding a bicycle safely", "swimming safely", "hiking in the mountains", "camping in the rain",
    "learning to draw", "learning to play the guitar", "getting along with neighbors", "helping the environment",
    "keeping houseplants alive", "spending less time on the phone", "starting a new job", "moving to a new home",
    "staying warm in winter", "staying cool in summer", "doing homework", "being more patient",
)  # fmt: skip

TASKS = (
    "make a cup of tea", "clean a window", "wash the dishes", "boil an egg", "make a sandwich", "bake a cake",
    "make pancakes", "cook rice", "make a salad", "make tomato soup", "make lemonade", "plant a seed",
    "water houseplants", "wash a car", "fix a flat bicycle tire", "paint a wall", "fold a shirt", "iron a shirt",
    "tie my shoes", "wrap a gift", "write a letter", "write a thank-you card", "draw a cat", "fly a kite",
    "build a snowman", "build a sandcastle", "make a paper boat", "make a birthday card", "clean my room",
    "brush my teeth", "wash my hands", "wash a dog", "feed a cat", "pack a lunch", "set the table", "make a bed",
    "do the laundry", "mop the floor", "change a light bulb", "hang a picture", "use a map", "light a campfire",
    "pick good fruit", "make a fruit salad", "make hot chocolate", "make popcorn", "learn to swim", "ride a bike",
    "plan a picnic", "read a clock",
)  # fmt: skip

PEOPLE = (
    "my neighbor", "my teacher", "my friend Anna", "my grandmother", "my uncle", "my sister", "my boss",
    "my doctor", "my coach", "my coworker",
)  # fmt: skip

FAVORS = (
    "watering my plants", "helping me move", "a birthday gift", "a warm meal", "good advice", "fixing my bike",
    "a nice weekend", "looking after my cat", "a book", "a ride to the airport", "teaching me to cook",
    "listening to me",
)  # fmt: skip

FEELINGS = (
    ("nervous", ("I have a test tomorrow", "I start a new job on Monday", "I must give a speech",
                 "I am going to the dentist", "I will meet new people")),
    ("sad", ("my best friend moved away", "it has been raining all week", "I lost my favorite book",
             "my team lost the game", "I miss my family")),
    ("tired", ("I did not sleep well", "I worked all day", "I studied too long", "the week was very long",
               "my baby woke up at night")),
    ("bored", ("it is a rainy day", "I have nothing to do", "my friends are busy", "the trip is very long",
               "I have finished all my books")),
    ("happy", ("I passed my test", "I got a new puppy", "I made a new friend", "it is my birthday",
               "I am going on a trip")),
    ("angry", ("my brother broke my toy", "my train was late", "someone was rude to me", "I lost my keys",
               "my plan did not work")),
    ("worried", ("my cat is not eating", "I forgot my homework", "my friend is sick", "I spent too much money",
                 "I am late for work")),
    ("lonely", ("I moved to a new city", "I work alone at home", "I have no one to talk to",
                "my sister left for college", "I eat lunch alone")),
)  # fmt: skip

JOBS = (
    "a teacher", "a doctor", "a nurse", "a baker", "a farmer", "a firefighter", "a police officer", "a pilot",
    "a sailor", "a cook", "a gardener", "a painter", "a writer", "a musician", "a scientist", "an engineer",
    "a carpenter", "a plumber", "a bus driver", "a librarian", "a dentist", "a vet", "a judge", "a fisherman",
    "a photographer", "a tailor", "an astronaut", "a mechanic", "a waiter", "a mail carrier",
)  # fmt: skip

OCCASIONS = (
    "a rainy Sunday", "a sunny day at the beach", "a trip to the zoo", "a day in the city", "a winter evening",
    "a picnic in the park", "a birthday party for a child", "a weekend with grandparents", "a day without a phone",
    "a quiet evening at home", "the first day of school", "a long train ride",
)  # fmt: skip

SMALL_TALK = (
    "Hello! How are you today?", "Good morning!", "What can you help me with?", "Tell me something nice.",
    "Tell me a fun fact about animals.", "Tell me a fun fact about space.", "Tell me a fun fact about food.",
    "What is your favorite season?", "What should I cook tonight?", "What should I read next?",
    "What is a good game to play with friends?", "Can you cheer me up?", "Do you like music?",
    "Thank you for your help!", "Good night!", "What is a good way to start the day?", "Say something kind.",
    "What should I do this weekend?", "Can you give me some advice?", "What is a nice thing to say to a friend?",
)  # fmt: skip
