// Every Kubernetes program of a test cluster in one binary, as they share most of their code: the name
// by which it is called says which.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	_ "time/tzdata"

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectlcmd "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	kcm "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	kubeproxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func main() {
	name := filepath.Base(os.Args[0])
	if len(os.Args) > 1 && name == "k8s-allinone" {
		name = os.Args[1]
		os.Args = os.Args[1:]
	}

	var c *cobra.Command
	switch name {
	case "kube-apiserver":
		c = apiserver.NewAPIServerCommand()
	case "kube-controller-manager":
		c = kcm.NewControllerManagerCommand()
	case "kube-scheduler":
		c = scheduler.NewSchedulerCommand()
	case "kube-proxy":
		c = kubeproxy.NewProxyCommand()
	case "kubelet":
		c = kubelet.NewKubeletCommand(context.Background())
	case "kubectl":
		c = kubectlcmd.NewDefaultKubectlCommand()
	default:
		fmt.Fprintln(os.Stderr, "unknown applet", name)
		os.Exit(2)
	}
	os.Exit(cli.Run(c))
}
