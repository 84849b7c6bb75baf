package redislease_test

import (
	"context"
	"log"
	"log/slog"
	"os"

	"github.com/redislease/redislease"
)

// logEvents returns an observer that logs. What an operator has to look at is a warning, above all a lease that was lost
// or whose release found the key no longer its own: somebody else may have worked at the same time.
func logEvents(logger *slog.Logger) func(context.Context, redislease.Event) {
	return func(ctx context.Context, e redislease.Event) {
		level := slog.LevelInfo
		switch e.Kind {
		case redislease.EventRenewed, redislease.EventNotAcquired:
			level = slog.LevelDebug
		case redislease.EventLost, redislease.EventAcquireFailed, redislease.EventRenewFailed:
			level = slog.LevelWarn
		case redislease.EventReleased:
			if e.Err != nil { // Redis refused or did not answer; the key lapses by itself
				level = slog.LevelWarn
			}
		}
		attributes := []slog.Attr{slog.String("key", e.Key)}
		switch e.Kind {
		case redislease.EventAcquired, redislease.EventNotAcquired, redislease.EventAcquireFailed:
			attributes = append(attributes, slog.Duration("took", e.Took))
		case redislease.EventLost, redislease.EventReleased:
			attributes = append(attributes, slog.Duration("held", e.Held))
		}
		if e.Err != nil {
			attributes = append(attributes, slog.Any("err", e.Err))
		}
		logger.LogAttrs(ctx, level, "lease "+e.Kind.String(), attributes...)
	}
}

// An observer that logs with log/slog.
func ExampleWithObserver_slog() {
	server, client, stop := startRedis()
	defer stop()
	logger := slog.New(slog.NewTextHandler(os.Stdout, &slog.HandlerOptions{
		ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr { // only so that this output is the same every time
			if k := a.Value.Kind(); k == slog.KindTime || k == slog.KindDuration {
				return slog.Attr{}
			}
			return a
		},
	}))
	locker, err := redislease.New(client, redislease.WithObserver(logEvents(logger)))
	if err != nil {
		log.Fatal(err)
	}

	ctx := context.Background()
	for _, key := range []string{"invoices", "reminders"} {
		lease, err := locker.TryAcquire(ctx, key)
		if err != nil {
			log.Fatal(err)
		}
		if key == "reminders" {
			if err := server.Set(key, "another token"); err != nil {
				log.Fatal(err)
			}
		}
		_ = lease.Release() // the observer hears of it
	}
	// Output:
	// level=INFO msg="lease acquired" key=invoices
	// level=INFO msg="lease released" key=invoices
	// level=INFO msg="lease acquired" key=reminders
	// level=WARN msg="lease lost" key=reminders err="redislease: lease \"reminders\" lost: the key holds another token"
}
