-- `number` gives the order of siblings, and the search index its row ids. `choice` is JSON: the model of a conversation
-- and how it is loaded. An attachment without a message belongs to a draft; `document` is the kept file that it copies,
-- itself for a kept file, whose `tokens` are counted.

CREATE TABLE IF NOT EXISTS conversations (
    id TEXT PRIMARY KEY,
    title TEXT NOT NULL,
    system TEXT NOT NULL,
    options TEXT NOT NULL,
    leaf TEXT,
    created REAL NOT NULL,
    updated REAL NOT NULL,
    choice TEXT
);
CREATE TABLE IF NOT EXISTS messages (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    conversation TEXT NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
    parent TEXT REFERENCES messages (id) ON DELETE CASCADE,
    role TEXT NOT NULL CHECK (role IN ('user', 'assistant')),
    content TEXT NOT NULL,
    created REAL NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('complete', 'replying', 'stopped', 'error', 'interrupted')),
    failure TEXT,
    figures TEXT,
    calls TEXT,
    holder TEXT
);
CREATE TABLE IF NOT EXISTS attachments (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    message TEXT REFERENCES messages (id) ON DELETE CASCADE,
    name TEXT NOT NULL,
    kind TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    pages INTEGER,
    content TEXT NOT NULL,
    created REAL NOT NULL,
    document TEXT,
    tokens INTEGER
);
CREATE INDEX IF NOT EXISTS conversations_updated ON conversations (updated);
CREATE INDEX IF NOT EXISTS messages_conversation ON messages (conversation);
CREATE INDEX IF NOT EXISTS messages_parent ON messages (parent);
CREATE INDEX IF NOT EXISTS messages_replying ON messages (holder) WHERE status = 'replying';
CREATE INDEX IF NOT EXISTS attachments_message ON attachments (message);
CREATE INDEX IF NOT EXISTS attachments_kept ON attachments (id) WHERE document = id;
