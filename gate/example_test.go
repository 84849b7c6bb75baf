package gate_test

import (
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"

	"github.com/redislease/redislease/gate"
)

// balances is a service that keeps the balances of accounts: PUT /accounts/{account} with the new balance as its body,
// and the fence of the caller's lease in the header Lease-Fence.
type balances struct {
	gate *gate.Gate
	mu   sync.Mutex
	of   map[string]string // stands for the place where a balance lands
}

func (b *balances) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	account := r.PathValue("account")
	fence, err := strconv.ParseInt(r.Header.Get("Lease-Fence"), 10, 64)
	if err != nil || fence < 1 { // -1: the lease was taken without redislease.WithFencing
		http.Error(w, "Lease-Fence: the fence of a lease, a number of at least 1, is needed", http.StatusBadRequest)
		return
	}
	balance, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 100)) // before Do: nobody waits for a slow client
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	err = b.gate.Do(r.Context(), account, fence, func() error { return b.save(account, string(balance)) })
	switch {
	case errors.Is(err, gate.ErrStale), errors.Is(err, gate.ErrForgotten):
		http.Error(w, err.Error(), http.StatusConflict) // the caller's lease is over, or too old to tell: acquire anew
	case err != nil:
		log.Print(err)
		http.Error(w, "not saved", http.StatusInternalServerError)
	default:
		w.WriteHeader(http.StatusNoContent)
	}
}

func (b *balances) save(account, balance string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.of[account] = balance
	return nil
}

// A service that receives the fence with each request, and refuses that of a holder whose lease is over.
func Example() {
	g, err := gate.New(10_000) // accounts
	if err != nil {
		log.Fatal(err)
	}
	service := &balances{gate: g, of: map[string]string{}}
	mux := http.NewServeMux()
	mux.Handle("PUT /accounts/{account}", service)
	site := httptest.NewServer(mux)
	defer site.Close()

	put := func(fence, balance string) {
		request, err := http.NewRequest(http.MethodPut, site.URL+"/accounts/7", strings.NewReader(balance))
		if err != nil {
			log.Fatal(err)
		}
		if fence != "" {
			request.Header.Set("Lease-Fence", fence) // strconv.FormatInt(lease.Fence(), 10)
		}
		response, err := site.Client().Do(request)
		if err != nil {
			log.Fatal(err)
		}
		defer response.Body.Close()
		text, err := io.ReadAll(response.Body)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(strings.TrimSpace(fmt.Sprintf("%d %s", response.StatusCode, text)))
	}
	put("41", "100") // a replica that then stands still, past the end of its lease
	put("42", "120") // the one that took over
	put("41", "105") // the first goes on
	put("42", "130")
	put("", "0")
	put("-1", "0")
	put("1e9", "0")
	fmt.Println("balance:", service.of["7"])
	// Output:
	// 204
	// 204
	// 409 gate: "7": stale fence: 41, after 42 was seen
	// 204
	// 400 Lease-Fence: the fence of a lease, a number of at least 1, is needed
	// 400 Lease-Fence: the fence of a lease, a number of at least 1, is needed
	// 400 Lease-Fence: the fence of a lease, a number of at least 1, is needed
	// balance: 130
}
