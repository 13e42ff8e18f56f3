// A back end in Go that issues chat tokens to its users and serves a folder: go run . FOLDER
// CHAT_SECRET is the secret in the gateway's auth.keys.
package main

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/golang-jwt/jwt/v5"
)

var secret = []byte(os.Getenv("CHAT_SECRET"))

// mint returns a token of a user. The SDK asks for a new one before it expires.
func mint(user string) (string, error) {
	expires := jwt.NewNumericDate(time.Now().Add(15 * time.Minute))
	claims := jwt.RegisteredClaims{Subject: user, ExpiresAt: expires}
	return jwt.NewWithClaims(jwt.SigningMethodHS256, claims).SignedString(secret)
}

// visitor returns the user. Put your own sign-in here; in this example a cookie makes each browser a visitor.
func visitor(w http.ResponseWriter, r *http.Request) (string, error) {
	cookie, err := r.Cookie("session")
	if err != nil {
		random := make([]byte, 24)
		if _, err := rand.Read(random); err != nil {
			return "", err
		}
		session := base64.RawURLEncoding.EncodeToString(random)
		cookie = &http.Cookie{Name: "session", Value: session, HttpOnly: true, SameSite: http.SameSiteLaxMode, Path: "/"}
		http.SetCookie(w, cookie)
	}
	// Other users see the user id, so it must not reveal the session.
	hash := sha256.Sum256([]byte(cookie.Value))
	return "visitor-" + hex.EncodeToString(hash[:6]), nil
}

func chatToken(w http.ResponseWriter, r *http.Request) {
	user, err := visitor(w, r)
	var token string
	if err == nil {
		token, err = mint(user)
	}
	if err != nil {
		http.Error(w, "no token", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	json.NewEncoder(w).Encode(map[string]string{"token": token})
}

func main() {
	if len(secret) < 32 {
		log.Fatal("CHAT_SECRET needs at least 32 bytes. Generate one with: openssl rand -base64 48")
	}
	folder, port := ".", "3000"
	if len(os.Args) > 1 {
		folder = os.Args[1]
	}
	if value := os.Getenv("PORT"); value != "" {
		port = value
	}
	http.HandleFunc("/chat-token", chatToken)
	http.Handle("/", http.FileServer(http.Dir(folder)))
	listener, err := net.Listen("tcp", "127.0.0.1:"+port)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("http://localhost:%s/\n", port)
	log.Fatal(http.Serve(listener, nil))
}
