package gate

import (
	"container/heap"
	"fmt"
)

// memory is the greatest fence of each of at most limit resources.
//
// What it forgets is the smallest, which becomes the floor. The floor thus never falls and is never above what is
// remembered; and each forgotten fence is at most the floor, so that a fence from there on is not below one that its
// resource had. Below it nobody can know.
type memory struct {
	limit  int
	floor  int64
	seen   map[string]*seen
	lowest byFence
}

// seen is what is remembered of a resource.
type seen struct {
	resource string
	fence    int64
	index    int // in lowest
}

func newMemory(limit int) memory {
	return memory{limit: limit, seen: map[string]*seen{}}
}

// admit returns nil, and takes note of the fence, unless it is or may be below one that the resource had.
func (m *memory) admit(resource string, fence int64) error {
	s := m.seen[resource]
	switch {
	case s == nil && fence < m.floor:
		return fmt.Errorf("gate: %q: %w: fence %d is below %d, up to which resources were forgotten", resource, ErrForgotten, fence, m.floor)
	case s == nil:
		s = &seen{resource: resource, fence: fence}
		m.seen[resource] = s
		heap.Push(&m.lowest, s)
		m.forget()
	case fence < s.fence:
		return &StaleError{Resource: resource, Fence: fence, Seen: s.fence}
	case fence > s.fence:
		s.fence = fence
		heap.Fix(&m.lowest, s.index)
	}
	return nil
}

// forget makes room, perhaps by forgetting the newcomer itself.
func (m *memory) forget() {
	if len(m.lowest) <= m.limit {
		return
	}
	s := heap.Pop(&m.lowest).(*seen)
	delete(m.seen, s.resource)
	m.floor = s.fence
}

// byFence is a heap with the smallest fence at its top.
type byFence []*seen

func (h byFence) Len() int           { return len(h) }
func (h byFence) Less(i, j int) bool { return h[i].fence < h[j].fence }
func (h byFence) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

func (h *byFence) Push(x any) {
	s := x.(*seen)
	s.index = len(*h)
	*h = append(*h, s)
}

func (h *byFence) Pop() any {
	last := len(*h) - 1
	s := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	return s
}
