package sqlfence

import (
	"errors"
	"fmt"
	"strings"
)

// A Dialect says which database a [Guard] works on. The zero value is none.
type Dialect int

// The dialects. MySQL is MariaDB's too.
const (
	PostgreSQL Dialect = iota + 1
	MySQL
	SQLite
)

// String returns the name of the database.
func (d Dialect) String() string {
	if s := d.sql(); s != nil {
		return s.name
	}
	return fmt.Sprintf("Dialect(%d)", int(d))
}

// dialectSQL is what differs between the databases. In the statements %s is the table.
//
// Each upsert takes the lock of the row, or of the database, whether the number changes or not, and leaves and returns
// the greater one. The number that comes back is thus never from an older snapshot, and a refused fence changes nothing.
type dialectSQL struct {
	name   string
	quote  string
	schema string
	admit  string
}

var dialects = map[Dialect]*dialectSQL{
	PostgreSQL: {
		name:  "PostgreSQL",
		quote: `"`,
		schema: `CREATE TABLE IF NOT EXISTS %s (
	resource text COLLATE "C" NOT NULL PRIMARY KEY,
	fence bigint NOT NULL
)`,
		admit: `INSERT INTO %s AS f (resource, fence) VALUES ($1, $2)
ON CONFLICT (resource) DO UPDATE SET fence = GREATEST(f.fence, EXCLUDED.fence)
RETURNING fence`,
	},
	// Counts of affected rows depend on the client (clientFoundRows), RETURNING is MariaDB's only, and a SELECT would be
	// another round trip. LAST_INSERT_ID comes back with the result of the statement itself: the argument of its last
	// call, which is that in the second line if there was a row already. A client that does not hand it on shows 0.
	MySQL: {
		name:  "MySQL",
		quote: "`",
		schema: `CREATE TABLE IF NOT EXISTS %s (
	resource VARBINARY(255) NOT NULL PRIMARY KEY,
	fence BIGINT NOT NULL
) ENGINE=InnoDB`,
		admit: `INSERT INTO %s (resource, fence) VALUES (?, LAST_INSERT_ID(?))
ON DUPLICATE KEY UPDATE fence = LAST_INSERT_ID(GREATEST(fence, ?))`,
	},
	SQLite: {
		name:  "SQLite",
		quote: `"`,
		schema: `CREATE TABLE IF NOT EXISTS %s (
	resource TEXT COLLATE BINARY NOT NULL PRIMARY KEY,
	fence INTEGER NOT NULL
) WITHOUT ROWID`,
		admit: `INSERT INTO %s AS f (resource, fence) VALUES (?, ?)
ON CONFLICT (resource) DO UPDATE SET fence = max(f.fence, excluded.fence)
RETURNING fence`,
	},
}

func (d Dialect) sql() *dialectSQL { return dialects[d] }

// maxName is PostgreSQL's limit, which cuts longer names off without an error. MySQL's is 64.
const maxName = 63

// table returns the name quoted.
func (s *dialectSQL) table(name string) (string, error) {
	parts := strings.Split(name, ".")
	if len(parts) > 2 {
		return "", errors.New("at most one dot, between schema and table")
	}
	for i, part := range parts {
		if err := checkName(part); err != nil {
			return "", err
		}
		parts[i] = s.quote + part + s.quote
	}
	return strings.Join(parts, "."), nil
}

func checkName(name string) error {
	switch {
	case name == "":
		return errors.New("a name must not be empty")
	case len(name) > maxName:
		return fmt.Errorf("a name must not be longer than %d bytes, and this has %d", maxName, len(name))
	case '0' <= name[0] && name[0] <= '9':
		return errors.New("a name must not begin with a digit")
	}
	for _, r := range name {
		if r != '_' && (r < '0' || r > '9') && (r < 'A' || r > 'Z') && (r < 'a' || r > 'z') {
			return fmt.Errorf("a name must consist of the letters a to z and A to Z, digits and underscores, without %q", r)
		}
	}
	return nil
}
