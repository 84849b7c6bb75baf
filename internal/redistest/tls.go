package redistest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// TLS is a server that speaks TLS on a port of its own; Addr and Do are without.
type TLS struct {
	*Server
	CA []byte // the certificate, in PEM, that the server's is signed with
}

// StartTLS is Start for a server that speaks TLS as well. A server that was built without it counts as none.
func StartTLS(t testing.TB, args ...string) *TLS {
	t.Helper()
	s := &TLS{Server: newServer(t, nil)}
	cert, key := s.certify()
	s.args = append([]string{
		"--tls-port", FreePort, "--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", cert,
		"--tls-auth-clients", "no",
	}, args...)
	switch err := s.tryStart(); {
	case err == nil:
	case strings.Contains(err.Error(), "Bad directive"):
		missing(t, fmt.Errorf("%s has no TLS", s.binary))
	default:
		t.Fatalf("redistest: start %s: %v", s.binary, err)
	}
	return s
}

// TLSAddr returns host:port of TLS.
func (s *TLS) TLSAddr() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(s.extra)) }

// Config returns the configuration of a client that trusts this server and no other.
func (s *TLS) Config() *tls.Config {
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(s.CA)
	return &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
}

// certify writes a certificate for 127.0.0.1, signed by itself, and its key into the server's directory.
func (s *TLS) certify() (certFile, keyFile string) {
	s.t.Helper()
	fail := func(err error) {
		if err != nil {
			s.t.Fatalf("redistest: certificate: %v", err)
		}
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	fail(err)
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{CommonName: "redistest"},
		NotBefore:             now.Add(-time.Hour),
		NotAfter:              now.Add(24 * time.Hour),
		IPAddresses:           []net.IP{net.IPv4(127, 0, 0, 1)},
		KeyUsage:              x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		BasicConstraintsValid: true,
		IsCA:                  true,
	}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	fail(err)
	der, err := x509.MarshalPKCS8PrivateKey(key)
	fail(err)
	s.CA = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert})
	certFile, keyFile = filepath.Join(s.dir, "cert.pem"), filepath.Join(s.dir, "key.pem")
	fail(os.WriteFile(certFile, s.CA, 0o600))
	fail(os.WriteFile(keyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), 0o600))
	return certFile, keyFile
}
