"""Work out what an order costs: pieces times price, a discount above a limit, tax, and shipping."""
import json, random
from sandbox.contract import Task, Score
def tool(n,d,**p):
    return {"type":"function","function":{"name":n,"description":d,"parameters":{"type":"object","properties":p,"required":list(p)}}}
def call(n,**a):
    return {"role":"assistant","content":None,"tool_calls":[{"id":"c1","type":"function","function":{"name":n,"arguments":json.dumps(a)}}]}
class Base:
    limit = 30
    def step(self,m):
        self.turn+=1; calls=m.get("tool_calls") or []
        if not calls: self.ended=True
        return [{"role":"tool","tool_call_id":c["id"],"content":json.dumps(self._safe(c["function"]))} for c in calls]
    def _safe(self,f):
        try:
            return self._do(f["name"],json.loads(f["arguments"]))
        except (KeyError,TypeError,ValueError,IndexError,AttributeError): return {"error":"no such tool, or arguments that do not fit"}
    @property
    def done(self): return self.ended or self.turn>=self.limit
    def score(self):
        return Score(1.0 if self.won else 0.0,self.won,{})

TOOLS=[tool("read_order","An order's lines.",order={"type":"string"}),tool("read_terms","Discount, tax and shipping of a customer.",customer={"type":"string"}),tool("send_invoice","Send the invoice.",order={"type":"string"},total_cents={"type":"integer"})]
class Environment(Base):
    def reset(self,seed):
        rng=random.Random(seed); self.turn=0; self.ended=self.won=False; self.sent=None
        self.id=f"A{rng.randrange(1000,9999)}"; self.customer=rng.choice(["Miller","Novak","Rossi","Dubois","Jensen"])
        self.lines=[{"article":rng.choice(["lamp","chair","rug","vase"]),"pieces":rng.randrange(1,12),"cents":rng.randrange(199,9999)} for _ in range(rng.randrange(1,5))]
        self.terms={"discount_percent":rng.choice([0,5,10]),"discount_above_cents":rng.randrange(5000,40000),"tax_percent":rng.choice([7,19,20]),"shipping_cents":rng.choice([490,690,1290])}
        t=rng.choice(["Please invoice order {}.","Order {} is packed. Send the invoice.","What does {} cost? Invoice it, please.","Can you bill {} today?","{} needs its invoice."]).format(self.id)
        return Task("You write invoices: pieces times price; the discount where the sum is above the customer's limit; then tax, rounded to the cent; shipping last, untaxed.",[{"role":"user","content":t}],TOOLS)
    def total(self):
        s=sum(l["pieces"]*l["cents"] for l in self.lines); t=self.terms
        if s>t["discount_above_cents"]: s=round(s*(100-t["discount_percent"])/100)
        return round(s*(100+t["tax_percent"])/100)+t["shipping_cents"]
    def _do(self,name,a):
        if name=="read_order" and a["order"]==self.id: return {"order":self.id,"customer":self.customer,"lines":self.lines}
        if name=="read_terms" and a["customer"]==self.customer: return self.terms
        if name=="send_invoice" and a["order"]==self.id and self.sent is None:
            self.sent=int(a["total_cents"]); self.ended=True; self.won=self.sent==self.total(); return {"sent":True}
        raise ValueError
    def oracle(self):
        yield call("read_order",order=self.id); yield call("read_terms",customer=self.customer); yield call("send_invoice",order=self.id,total_cents=self.total())
