// What containers of a test cluster run while no real image is needed: one static program.
//
//	probe pause              waits, and reaps the orphans of a pod, as a sandbox's first process
//	probe serve [ADDRESS]    answers every request with the pod's name and the path
//	probe get URL            prints the answer; fails unless it is a 200
//	probe env PREFIX         prints the environment's variables of that prefix, then waits
//	probe resolve NAME       prints the name's addresses
//	probe show FILE          prints the file
//	probe exit CODE MESSAGE  writes the termination message and ends
package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"
)

func main() {
	if len(os.Args) < 2 {
		fail("which part?")
	}
	argument := func(i int) string {
		if len(os.Args) > i {
			return os.Args[i]
		}
		fail("%s lacks an argument", os.Args[1])
		return ""
	}
	switch os.Args[1] {
	case "pause":
		reapUntilTerminated()
	case "serve":
		address := ":8000"
		if len(os.Args) > 2 {
			address = os.Args[2]
		}
		serve(address)
	case "get":
		get(argument(2))
	case "env":
		for _, variable := range os.Environ() {
			if strings.HasPrefix(variable, argument(2)) {
				fmt.Println(variable)
			}
		}
		reapUntilTerminated()
	case "resolve":
		resolve(argument(2))
	case "show":
		data, err := os.ReadFile(argument(2))
		check(err)
		_, err = os.Stdout.Write(data)
		check(err)
	case "exit":
		exit(argument(2), argument(3))
	default:
		fail("no part %q", os.Args[1])
	}
}

func reapUntilTerminated() {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGCHLD)
	for received := range signals {
		if received != syscall.SIGCHLD {
			return
		}
		for {
			pid, _ := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
			if pid <= 0 {
				break
			}
		}
	}
}

func serve(address string) {
	hostname, err := os.Hostname()
	check(err)
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%s %s\n", hostname, r.URL.Path)
	})
	server := &http.Server{Addr: address, Handler: handler}
	terminated, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	go func() {
		<-terminated.Done()
		_ = server.Shutdown(context.Background())
	}()
	if err := server.ListenAndServe(); err != http.ErrServerClosed {
		check(err)
	}
}

func get(url string) {
	client := http.Client{Timeout: 5 * time.Second}
	answer, err := client.Get(url)
	check(err)
	defer answer.Body.Close()
	_, err = io.Copy(os.Stdout, answer.Body)
	check(err)
	if answer.StatusCode != http.StatusOK {
		fail("%s", answer.Status)
	}
}

func resolve(name string) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	addresses, err := net.DefaultResolver.LookupHost(ctx, name)
	check(err)
	fmt.Println(strings.Join(addresses, " "))
}

func exit(code, message string) {
	status, err := strconv.Atoi(code)
	check(err)
	check(os.WriteFile("/dev/termination-log", []byte(message), 0o644))
	os.Exit(status)
}

func check(err error) {
	if err != nil {
		fail("%v", err)
	}
}

func fail(format string, values ...any) {
	fmt.Fprintf(os.Stderr, "probe: "+format+"\n", values...)
	os.Exit(1)
}
