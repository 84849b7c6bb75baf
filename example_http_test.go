package redislease_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"

	"github.com/redislease/redislease"
)

// exporter writes one export at a time for all replicas.
type exporter struct {
	locker *redislease.Locker
	write  func(context.Context, *redislease.Lease) error
}

func (e *exporter) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	lease, err := e.locker.TryAcquire(r.Context(), "export")
	switch {
	case errors.Is(err, redislease.ErrNotAcquired):
		w.Header().Set("Retry-After", "10")
		http.Error(w, "an export is running", http.StatusConflict)
		return
	case err != nil:
		log.Print(err)
		http.Error(w, "no lease", http.StatusServiceUnavailable)
		return
	}
	defer lease.Release() // works although r.Context() is dead by then, if the client has gone away

	if err := e.write(lease.Context(), lease); err != nil {
		log.Print(err)
		http.Error(w, "the export failed", http.StatusInternalServerError)
	}
}

// An HTTP handler whose client goes away: the work stops with the request's context, and the key is free at once, not
// only after a TTL.
func Example_httpHandler() {
	server, client, stop := startRedis()
	defer stop()
	locker, err := redislease.New(client)
	if err != nil {
		log.Fatal(err)
	}

	writing := make(chan struct{})
	finished := make(chan struct{})
	handler := &exporter{locker, func(ctx context.Context, lease *redislease.Lease) error {
		close(writing)
		<-ctx.Done() // a long export
		fmt.Println("stopped:", context.Cause(ctx), "- may the last row still land?", lease.Err() == nil)
		return nil
	}}
	site := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer close(finished)
		handler.ServeHTTP(w, r)
	}))
	defer site.Close()

	ctx, goAway := context.WithCancel(context.Background())
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, site.URL, nil)
	if err != nil {
		log.Fatal(err)
	}
	go func() {
		<-writing
		fmt.Println("key while it writes:", server.Exists("export"))
		goAway()
	}()
	if _, err := site.Client().Do(request); !errors.Is(err, context.Canceled) {
		log.Fatal(err)
	}
	<-finished
	fmt.Println("key afterwards:", server.Exists("export"))
	// Output:
	// key while it writes: true
	// stopped: context canceled - may the last row still land? true
	// key afterwards: false
}
