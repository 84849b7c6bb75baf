package gate

// Remembered returns how many resources the Gate remembers, and how many turns it keeps.
func (g *Gate) Remembered() (resources, turns int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.memory.seen) != len(g.memory.lowest) {
		panic("the map and the heap differ")
	}
	return len(g.memory.seen), len(g.turns)
}
