"""Tasks that people give a code model, as plain lists.

Combined with a language and a phrasing, each becomes a prompt. None of them is an evaluation prompt
(`bench/data/new-code.jsonl`).
"""

from __future__ import annotations

LANGUAGES = ("Python", "Python", "Python", "JavaScript", "TypeScript", "Go", "Rust", "Java", "C", "C++")

FUNCTIONS = tuple(
    line.strip()
    for line in """
    checks whether a string is a palindrome, ignoring case and punctuation
    merges two sorted lists into one sorted list
    computes the greatest common divisor of two integers
    returns the n-th Fibonacci number with memoisation
    flattens an arbitrarily nested list
    counts how often each word occurs in a text
    reverses the words of a sentence
    finds the longest common prefix of a list of strings
    converts a Roman numeral to an integer
    converts an integer to a Roman numeral
    validates an e-mail address
    parses a query string into a map
    parses a line of CSV with quoted fields
    formats a number of bytes for people
    formats a duration in seconds as hours, minutes and seconds
    computes the Levenshtein distance of two strings
    performs a binary search in a sorted array
    sorts a list with quicksort
    sorts a list with merge sort
    sorts a list with heap sort
    removes duplicates from a list while keeping its order
    groups a list of records by a key
    splits a list into chunks of a given size
    rotates a matrix by ninety degrees
    transposes a matrix
    multiplies two matrices
    returns all permutations of a list
    returns all subsets of a set
    generates all combinations of k elements
    checks whether brackets in a string are balanced
    evaluates an arithmetic expression in reverse Polish notation
    evaluates an infix expression with parentheses
    finds the shortest path in a grid with breadth-first search
    runs Dijkstra's algorithm on a weighted graph
    does a topological sort of a directed graph
    detects a cycle in a linked list
    reverses a linked list
    finds the lowest common ancestor in a binary tree
    checks whether a binary tree is balanced
    walks a binary tree level by level
    serialises a binary tree to a string and back
    computes the power set lazily
    finds two numbers in an array that add up to a target
    finds the maximum sum of a contiguous subarray
    finds the longest increasing subsequence
    solves the 0/1 knapsack problem with dynamic programming
    counts the ways to climb n stairs
    finds the longest palindromic substring
    computes the edit script between two lists of lines
    generates the first n rows of Pascal's triangle
    lists the prime numbers up to n with a sieve
    factorises an integer into primes
    computes a to the power b modulo m
    converts a number between two bases
    computes a running median of a stream
    computes mean, median and standard deviation
    normalises a vector
    computes the cosine similarity of two vectors
    interpolates linearly between points
    downloads a file with retries and exponential back-off
    retries a function a given number of times
    debounces calls of another function
    throttles calls of another function
    memoises another function with a limit on entries
    composes several functions into one
    deep-copies a nested structure
    merges two nested dictionaries
    compares two nested structures and returns their differences
    reads a configuration file with defaults
    reads a large file line by line and counts matching lines
    walks a directory and returns files with a given suffix
    copies a directory tree
    finds duplicate files by their hash
    writes a file atomically
    tails a file and yields new lines
    compresses a string by run lengths
    encodes and decodes Base64 without a library
    encrypts text with a Caesar cipher
    hashes a password with a salt and verifies it
    generates a random password
    generates a slug from a title
    converts snake case to camel case
    wraps text at a given width
    highlights search terms in a text
    parses a date in several formats
    computes the working days between two dates
    prints a calendar of a month
    parses command-line arguments for a small tool
    sends an HTTP request and decodes the JSON answer
    starts a small HTTP server with one route
    connects to a database and inserts rows in one transaction
    pages through the results of an API
    builds an SQL query with parameters
    renders a template with placeholders
    escapes HTML
    extracts all links from an HTML page
    tokenises source code of a small language
    implements a recursive descent parser for JSON
    draws a progress bar in the terminal
    prints a table with aligned columns
    logs how long a block of code takes
    runs tasks in parallel with a limit on concurrency
    runs several coroutines and collects their results
    reads messages from a queue and handles them
    schedules a function to run every few seconds
    simulates Conway's Game of Life for one step
    solves a Sudoku by backtracking
    solves the n-queens problem
    finds the convex hull of points
    checks whether a point lies inside a polygon
    computes the distance between two coordinates on Earth
    converts temperatures between scales
    resizes an image while keeping its proportions
    computes a histogram of an image
    trains a simple linear regression with gradient descent
    splits a data set into training and test parts
    one-hot encodes a categorical column
    implements k-means clustering
    implements a k-nearest-neighbours classifier
    computes a confusion matrix
    loads a CSV file and summarises each column
    plots a line chart from two lists
""".strip().splitlines()
)

CLASSES = tuple(
    line.strip()
    for line in """
    a stack with push, pop, peek and a maximum in constant time
    a queue made of two stacks
    a circular buffer of fixed size
    a singly linked list with insert, delete and iteration
    a doubly linked list
    a binary search tree with insert, find and delete
    an AVL tree
    a trie with prefix search
    a min-heap
    a priority queue with changeable priorities
    a hash map with chaining
    a disjoint-set structure with path compression
    a directed graph with depth-first and breadth-first search
    a bank account with deposits, withdrawals and a history
    a shopping cart with discounts
    an inventory that tracks stock and raises when it is empty
    a parking lot with several sizes of spots
    a library that lends books to members
    a deck of cards that can be shuffled and dealt
    a game of tic-tac-toe
    a matrix with addition, multiplication and a determinant
    a complex number with arithmetic
    a fraction that stays reduced
    a polynomial with evaluation and multiplication
    a two-dimensional vector with operators
    a date range that can be intersected and iterated
    a temperature sensor that notifies observers
    an event emitter with on, off and emit
    a publish-subscribe bus
    a finite state machine with named transitions
    a command history with undo and redo
    a token bucket
    a circuit breaker
    a connection pool
    a thread pool
    a job queue with priorities and retries
    a simple in-memory key-value store with expiry
    a logger with levels and several outputs
    a configuration that reads files and environment variables
    a text tokeniser
    a small calculator with variables
    a markdown to HTML converter
    an HTTP client with default headers and retries
    a REST controller for users with create, read, update and delete
    a repository over a database table
    a validation schema for nested data
    a user model with password hashing
    a session manager with timeouts
    a file watcher that calls back on changes
    a progress tracker that estimates the time left
    a simple neural network with one hidden layer
    a data loader that yields shuffled batches
    a moving average over a window
    a stopwatch with laps
    a countdown timer
    a snake game without graphics
    a maze generator and solver
    an elevator controller
    a vending machine
    a chat room with members and messages
""".strip().splitlines()
)

EDITS = (
    "add type annotations",
    "add a docstring",
    "handle empty input",
    "rename the first parameter to something clearer",
    "raise a clear error where an argument is invalid",
    "log what it does at debug level",
    "make it more readable without changing what it does",
    "add an optional timeout parameter",
    "return early instead of nesting",
    "replace magic numbers with named constants",
    "make it case-insensitive",
    "add a parameter verbose that is off by default",
    "use a comprehension where it reads better",
    "cache the result",
    "avoid mutating the arguments",
    "split it into two functions",
    "fix any bug you see",
    "add comments that say why",
)
