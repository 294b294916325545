"""The pure part: who runs next, which blocks they hold, what their text is. No loop, no tensor."""
